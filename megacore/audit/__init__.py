"""A ledger of a run that anybody can check: each step is a line of a hash chain, with a hash of weights and optimizer
state that does not depend on the layout (docs/guides/audit.md)."""
