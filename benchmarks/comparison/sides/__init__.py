"""One module per framework. Each has `build(job) -> Step`, called on every rank with torchrun's variables,
and `name(layout) -> str`: what of the framework is measured. `build` raises Unsupported where it has nothing.
"""
