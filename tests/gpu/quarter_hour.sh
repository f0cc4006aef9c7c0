#!/usr/bin/env bash
# A quarter of an hour on a GPU with many cores: bash tests/gpu/quarter_hour.sh FOLDER SECONDS [right] [STEP ...] [timed NAME ...]
#
# "right": every step that judges errors and no seconds, at once, SECONDS for all of them. STEP: one of first_hour.sh, or "first":
# scripts/first_step.py without and with LoRA, both at once; 80 seconds each. "timed": tests/gpu/timed_rows.py, one row after the
# other. WHEELS and PYTHON are those of first_hour.sh. FOLDER gets a file for each step, and all.tar.gz of them.
set -u
cd "$(dirname "$0")/../.." || exit 2
folder=${1:?"give a folder for the output"}
seconds=${2:?"give the seconds of the right steps"}
shift 2
mkdir -p "$folder"
python=${PYTHON:-python}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} LIMIT=$seconds
others=$PWD kernels=
if [ -n "${WHEELS:-}" ]; then
    unpacked=$(mktemp -d) || exit 2
    trap 'rm -rf "$unpacked"' EXIT
    for wheel in "$WHEELS"/*.whl; do
        case $wheel in */fla_core*) into=$unpacked/kernels ;; *) into=$unpacked/others ;; esac
        "$python" -m zipfile -e "$wheel" "$into" || exit 2
    done
    others=$PWD:$unpacked/others kernels=:$unpacked/kernels # the latter know no float64, and are for one step alone
fi
export WHEELS= PYTHONPATH=$others${PYTHONPATH:+:$PYTHONPATH}
[ "${1-}" != right ] || {
    shift
    for step in setups exact exact_all ops ops_large ops_small errors check suite pytest; do
        bash tests/gpu/first_hour.sh "$folder" $step ${TINY:+-- $TINY} >/dev/null 2>&1 &
    done
    PYTHONPATH=$PYTHONPATH$kernels bash tests/gpu/first_hour.sh "$folder" states ${TINY:+-- $TINY} >/dev/null 2>&1 &
    wait
    for file in "$folder"/*.txt; do
        echo "== $(basename "$file" .txt): $(tail -n 1 "$file")"
        grep -h 'FAILED\|!!\|^E  \|not run\| passed\| failed' "$file" | cut -c 1-400 | head -n 40
    done
}
while [ $# -gt 0 ] && [ "$1" != timed ]; do
    if [ "$1" = first ]; then
        "$python" scripts/first_step.py --lora ${TINY:+--device cpu --shape mini} >"$folder/first_lora.txt" 2>&1 &
        timeout 80 "$python" scripts/first_step.py ${TINY:+--device cpu --shape mini} 2>&1 | tee "$folder/first.txt" | head -n 40 | cut -c 1-160
        wait
    else
        LIMIT=80 bash tests/gpu/first_hour.sh "$folder" "$1" ${TINY:+-- $TINY} | cut -c 1-1200
    fi
    shift
done
[ "${1-}" != timed ] || {
    shift
    "$python" tests/gpu/timed_rows.py "$folder" "$@" ${TINY:+$TINY} 2>&1 | tee -a "$folder/timed.txt"
}
tar -C "$folder" -czf "$folder/all.tar.gz" --exclude=all.tar.gz .
