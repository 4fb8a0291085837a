"""The size of a bucket of parameters or gradients that the ranks of a replica group shard."""

from __future__ import annotations

# Least bytes of a rank's share of a bucket, or this part of the bucket where that is less: what each rank
# sends to each other is a share, and small messages do not use the network (Megatron-LM's buckets grow likewise).
_SHARE_BYTES = 1 << 20
_SMALLEST_SHARE = 16


def grown(bucket_bytes: int, ranks: int) -> int:
    """The size of a bucket that `ranks` ranks shard: as given, until a rank's share were below 1 MiB or a
    sixteenth of the bucket; from there on it grows with the ranks."""
    return max(bucket_bytes, ranks * min(_SHARE_BYTES, bucket_bytes // _SMALLEST_SHARE))
