#!/usr/bin/env bash
# The first hour on a GPU, in order of worth: bash tests/gpu/first_hour.sh FOLDER [STEP ...] [-- --device cpu --tiny]
#
# Each step is one command of less than ten minutes and writes to FOLDER/<step>.txt as it goes, so an interrupted hour leaves
# what it learnt; FOLDER/<step>.csv has rows of benchmarks. A step that has ended is not run again: its exit code is the
# last line of its file. Without STEP all of them run, one after the other, whatever the others found. What follows -- goes
# to every script of tests/gpu: STREAMBP_TEST_DEVICE=emulated bash tests/gpu/first_hour.sh FOLDER first -- --tiny rehearses
# the first step on an emulated GPU; with `--device cpu --tiny` the benchmarks, too, run a small shape on the CPU. Where FOLDER
# does not outlast a command, or may have few files, name the steps: each of them leaves two files at most.
#
# PYTHON   the interpreter (python)
# WHEELS   a folder of wheels that this machine lacks and that need no building: they are unpacked to a folder of their own
#          and put on PYTHONPATH. TRL imports datasets, which wants dill and multiprocess; no peer's row runs without.
#          Where there is a network, for a machine with Python 3.12:
#              pip download --no-deps --only-binary=:all: --python-version 3.12 -d FOLDER liger-kernel==0.8.5 \
#                  fla-core==0.6.0 trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
# MINUTES  begin no row of a step after so many (8.5); rows of their own processes are stopped then
set -u
cd "$(dirname "$0")/../.." || exit 2
folder=${1:?"give a folder for the output"}
shift
steps=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do steps+=("$1"); shift; done
[ $# -gt 0 ] && shift
python=${PYTHON:-python} minutes=${MINUTES:-8.5} tiny=0
case " $* " in *" --tiny "*) tiny=1 ;; esac
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
path=$PWD
if [ -n "${WHEELS:-}" ]; then
    unpacked=$(mktemp -d) || exit 2
    trap 'rm -rf "$unpacked"' EXIT
    for wheel in "$WHEELS"/*.whl; do "$python" -m zipfile -e "$wheel" "$unpacked" || exit 2; done
    path=$path:$unpacked
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

limited() { timeout -k 5 590 "$@"; }
rows() { # a script of tests/gpu and its own arguments; then those of every script
    script=$1
    shift
    limited "$python" "tests/gpu/$script.py" --minutes "$minutes" "$@" "${others[@]}"
}
table() { # a benchmark: name, lengths, methods
    if [ $tiny = 1 ]; then
        limited "$python" -m "paper_repro.$1" --output "$folder/$step.csv" --minutes "$minutes" --device cpu --shape mini \
            --lengths 64 --methods checkpointing streambp --chunk-size 24
    else
        # shellcheck disable=SC2086 # lists of words
        limited "$python" -m "paper_repro.$1" --output "$folder/$step.csv" --minutes "$minutes" --lengths $2 --methods $3
    fi
}
others=("$@")
PEERS="axolotl-liger streambp-liger trl-offload-liger liger alst"

run_step() {
    case $1 in
        first) rows exact_rows --row 'float64 qwen3' --row 'default*' --row stream --row dropout --row autocast ;;
        exact) rows exact_rows ;;
        headline) rows headline --csv "$folder/headline.csv" --row 'check*' --row '*-liger' ;;
        headline_plain) rows headline --row trl-selective --row streambp-lean --row checkpointing ;;
        ops) rows op_rows ;;
        errors) rows report --row 'plain *' --row 'left*' --row 'packed *' --row 'window *' ;;
        two_layers) rows report --row '[0-9]*' ;;
        offload) rows offload_rows --row '8B 65,536*' ;;
        offload_lora) rows offload_rows --row '8B LoRA*' ;;
        offload_full) rows offload_rows --row '4B full*' ;;
        peers) table memory_and_time 65536 "$PEERS" ;;
        length_16k) table memory_and_time 16384 "streambp-liger trl-selective-liger $PEERS streambp checkpointing" ;;
        length_128k) table memory_and_time 131072 "streambp-lean-liger trl-offload-liger" ;;
        offload_262k) rows offload_rows --row '8B 262,144' ;;
        states) rows state_rows ;;
        errors_right) rows report --row 'right*' ;;
        pytest) limited "$python" -m pytest -q -m "gpu and not full" tests -k "not precise and not test_rows and not peaks" ;;
        planner) limited "$python" -m pytest -q -s -m gpu tests/gpu/test_planner.py ;;
        *) echo "no step is named $1; they are: ${ALL[*]}" >&2; return 2 ;;
    esac
}
ALL=(first headline ops errors offload headline_plain peers length_16k length_128k states two_layers offload_lora
    offload_full offload_262k errors_right pytest planner exact)
[ ${#steps[@]} -gt 0 ] || steps=("${ALL[@]}")
failed=0
for step in "${steps[@]}"; do
    file=$folder/$step.txt
    if grep -qs '^exit code ' "$file"; then echo "== $step: done already"; continue; fi
    echo "== $step, $(date -u +%FT%TZ)"
    ( run_step "$step" ) 2>&1 | tee -a "$file"
    code=${PIPESTATUS[0]}
    echo "exit code $code" | tee -a "$file"
    [ "$code" = 0 ] || failed=1
done
exit $failed
