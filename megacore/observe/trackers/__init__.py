"""Where metrics go besides metrics.jsonl: CSV, TensorBoard, Weights & Biases. docs/reference/metrics.md lists the
metrics. A tracker is one file here and one line of `background_sinks` (background.py). Training never waits for one:
each writes in a separate thread, from a bounded queue."""
