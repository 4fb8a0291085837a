"""Pipeline parallelism: the layers of each rank, the order of its computations, and the transfers between stages."""
