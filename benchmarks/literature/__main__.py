"""All tables: `python -m benchmarks.literature`."""

from __future__ import annotations

import json

from benchmarks.bounds import console
from benchmarks.literature import asc_wfbp, mg_wfbp, streaming_diloco, torch_ddp
from benchmarks.scripts import options


def main() -> None:
    """Computes and prints; some ten seconds."""
    args = options(__doc__).parse_args()
    sources = (mg_wfbp, asc_wfbp, torch_ddp, streaming_diloco)
    results = [source.result() for source in sources]
    for result in results:
        console().print(result.table())
    if args.json is not None:
        values = [result.values() for result in results]
        args.json.write_text(json.dumps({"sources": values}, indent=2))


if __name__ == "__main__":
    main()
