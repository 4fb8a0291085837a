"""The ranks' groups, how they communicate, and which slice of every parameter each of them holds."""
