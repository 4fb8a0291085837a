"""`.bin`/`.idx` datasets: writing them from text, and reading them."""
