"""A run that does not die (`--survive`): each process that the launcher starts is a keeper, whose child trains. A child
that dies is replaced, and all continue within seconds from a copy of the state in memory. Optional: a tree without it
refuses the flag."""
