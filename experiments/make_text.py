"""Write a text of another kind than the calibration corpus, for `eval.other_text`: the Python reference.

`python -m experiments.make_text [FILE]`. The topics come with every Python (`pydoc_data`), so nothing is downloaded;
they differ a little between Python versions, which each row records.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

DEFAULT = "outputs/text/python_reference.txt"


def main(path: str = DEFAULT) -> None:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    print(f"{file}: {file.stat().st_size:,} bytes of {len(topics)} topics")


if __name__ == "__main__":
    main(*sys.argv[1:])
