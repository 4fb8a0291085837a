"""What the command-line tools share: their parser and exit statuses, a progress bar, and the conversion command."""
