"""The two checks of every config dataclass; each mistake is one `ValueError` naming key, value and legal ones."""


def check_choice(group: str, key: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{group}.{key}={value!r} is unknown; legal: {', '.join(legal)}")


def check_range(group: str, key: str, value: float | None, low: float, high: float | None = None) -> None:
    if value is None:
        return
    if not (low <= value < float("inf") and (high is None or value <= high)):  # NaN is out of range too
        legal = f"{low:g} or more" if high is None else f"{low:g} to {high:g}"
        raise ValueError(f"{group}.{key}={value} is out of range; legal: {legal}")
