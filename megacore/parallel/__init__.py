"""Where the ranks stand, how they talk, and which slice of every parameter each of them holds."""
