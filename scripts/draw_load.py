"""What each expert of a run had to do, layer by layer, as a heat map.

    python scripts/draw_load.py RUN_DIR [--png load.png] [--steps 3]

Draws the run's `expert_load.jsonl` at a few steps, the first and the last it has among them, and prints the
loads furthest from even at each.
"""

import argparse
import sys
from pathlib import Path

from jaxscale.metrics.load_map import choose_records, read_loads, save_load_map


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--png", type=Path, default=Path("load.png"))
    parser.add_argument("--steps", type=int, default=3, help="at most so many steps")
    args = parser.parse_args()
    path = args.run_dir / "expert_load.jsonl"
    if not path.exists():
        print(f"{path}: no such file; name the run_dir of a model with experts", file=sys.stderr)
        return 2
    records = read_loads(path)
    for record in records:
        shares = [share for layer in record.load for share in layer]
        print(f"step {record.step:,}: load {min(shares):.2f} to {max(shares):.2f} of an even share")
    save_load_map(args.png, choose_records(records, args.steps))
    print(f"drawn in {args.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
