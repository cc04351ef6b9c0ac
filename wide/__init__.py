"""WIDE: token-level dynamic width. `wide.load(folder)` gives its engine; the rest are modules."""


def __getattr__(name: str) -> object:
    """`wide.load`, imported at its first use: the package itself loads nothing heavy."""
    if name == "load":
        from wide.engine import load

        return load
    raise AttributeError(f"module 'wide' has no attribute {name!r}")
