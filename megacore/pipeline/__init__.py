"""Pipeline parallelism: which layers a rank holds, in which order it computes, and how stages hand over tensors."""
