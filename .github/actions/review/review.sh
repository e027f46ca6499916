#!/usr/bin/env bash
# Review the models named in $MODELS (one on each line) against $BASE; the table goes to the job's summary.
set -euo pipefail
mapfile -t models < <(grep -v '^[[:space:]]*$' <<<"$MODELS")
options=(--base "$BASE" --target "$TARGET" --points "$POINTS" --out "$RUNNER_TEMP/review.md")
if [ -n "$SCRIPT" ]; then options+=(--script "$SCRIPT"); fi
rm -f "$RUNNER_TEMP/review.md"
status=0
python -m anesurgery review "${models[@]}" "${options[@]}" || status=$?
if [ -f "$RUNNER_TEMP/review.md" ]; then
  cat "$RUNNER_TEMP/review.md" >>"$GITHUB_STEP_SUMMARY"
  if [ "$COMMENT" = true ]; then gh pr comment "$NUMBER" --body-file "$RUNNER_TEMP/review.md"; fi
fi
exit "$status"
