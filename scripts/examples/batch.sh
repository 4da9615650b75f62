#!/bin/sh
# Serves the requests of batch.jsonl, or of another file, and shows the replies in their order.
#
#     scripts/examples/batch.sh
#     scripts/examples/batch.sh requests.jsonl replies.jsonl -m LiquidAI/LFM2-350M --streams 16
#
# The first argument is the file of requests, the second that of replies (by default in a new
# folder); options of lfm2 batch may follow. Needs ./scripts/setup to have run.
#
# Stop it with Ctrl-C, or kill it, and call it again: --resume skips what has a reply already, tries
# again what became an error record, and begins where there is nothing yet. Exit codes are those of
# lfm2 batch: 0 all served, 1 some became error records, 2 refused, 130 interrupted.
set -eu
here=$(dirname "$0")
python=${PYTHON:-$here/../../.venv/bin/python}
command -v "$python" >/dev/null ||
    { echo "batch.sh: run ./scripts/setup first, or set PYTHON" >&2; exit 2; }

requests=${1:-$here/batch.jsonl}
replies=${2:-$(mktemp -d)/replies.jsonl}
[ $# -lt 2 ] || shift
[ $# -lt 1 ] || shift

code=0
"$python" -m lfm2 batch "$requests" --out "$replies" --resume "$@" || code=$?
[ $code -le 1 ] || exit $code

# Records stand in the order in which requests finished; their ids say whose they are.
"$python" - "$requests" "$replies" <<'END'
import json
import sys

# Not splitlines(), for which other characters end a line too.
requests, replies = (open(path, encoding="utf-8").read().split("\n") for path in sys.argv[1:])
by_id = {record["id"]: record for record in map(json.loads, filter(None, replies))}
for number, line in enumerate(requests, 1):
    try:
        request = json.loads(line)
        record = by_id[request.get("id", number)]
    except (ValueError, AttributeError, KeyError):
        continue
    print(f"{record['id']}: {record.get('text') or 'Error: ' + record.get('error', 'no text')}")
END
echo "all of it: $replies" >&2
exit $code
