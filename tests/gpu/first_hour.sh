#!/usr/bin/env bash
# The first hour on a GPU, in order of worth: bash tests/gpu/first_hour.sh FOLDER [LINE or STEP ...] [-- --tiny]
#
# A line ("1" to "6") is one command of less than ten minutes, a list of steps; lines 1 to 3 are the half hour that can show a
# fault. Each step runs alone, too, has a limit of its own in seconds, and writes to FOLDER/<step>.txt as it goes, so an
# interrupted hour leaves what it learnt; FOLDER/<step>.csv has rows of benchmarks. Rows go on after one that fails; a step
# with such a row, one that cannot run, or one whose time is over ends the call, which then names the rows, and the steps that
# were not begun (GO_ON=1: begin them all the same). A step that has ended is not run again: its exit code is the last line of
# its file. What follows -- goes to every script of tests/gpu. Where FOLDER does not outlast a command, or may have few files,
# name the lines: each leaves eight files at most.
#
# STREAMBP_TEST_DEVICE=emulated bash tests/gpu/first_hour.sh FOLDER -- --tiny rehearses all of it on an emulated GPU, in small
# shapes; with `-- --device cpu --tiny` the CPU is the device. docs/cuda.md lists what only a GPU can show.
#
# PYTHON   the interpreter (python)
# WHEELS   a folder of wheels that this machine lacks and that need no building: they are unpacked to a folder of their own
#          and put on PYTHONPATH. TRL imports datasets, which wants dill and multiprocess; no peer's row runs without.
#          Where there is a network, for a machine with Python 3.12:
#              pip download --no-deps --only-binary=:all: --python-version 3.12 -d FOLDER liger-kernel==0.8.5 \
#                  fla-core==0.6.0 trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
# GO_ON    1: a step that fails does not end the call
# LIMIT    seconds of each step, in place of its own
set -u
cd "$(dirname "$0")/../.." || exit 2
folder=${1:?"give a folder for the output"}
shift

# Steps and their seconds; the sum of a line is below ten minutes.
LINES=(
    "device:110 exact:150 ops:130 check:190"
    "headline:580"
    "default:420 limit:160"
    "setups:150 ops_large:160 errors:120 states:160"
    "offload:160 offload_lora:180 length_16k:120 length_128k:120"
    "headline_plain:580 peers:580 two_layers:300 offload_full:400 offload_262k:580 errors_right:300 ops_small:300 suite:580 pytest:580 planner:400 exact_all:580 few_bits:200"
)
PEERS="axolotl-liger streambp-liger trl-offload-liger liger alst"

wanted=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do wanted+=("$1"); shift; done
[ $# -gt 0 ] && shift
others=("$@")
[ ${#wanted[@]} -gt 0 ] || wanted=(1 2 3 4 5 6)
read -ra ALL <<<"${LINES[*]}"
steps=()
for name in "${wanted[@]}"; do
    case $name in
        [1-6]) read -ra found <<<"${LINES[$((name - 1))]}" ;;
        *) found=(); for step in "${ALL[@]}"; do [ "${step%:*}" = "$name" ] && found=("$step"); done ;;
    esac
    if [ ${#found[@]} = 0 ]; then
        echo "no line or step is named $name; lines are 1 to ${#LINES[@]}, steps: ${ALL[*]%:*}" >&2
        exit 2
    fi
    steps+=("${found[@]}")
done

python=${PYTHON:-python} tiny=0 device=${STREAMBP_TEST_DEVICE:-cuda}
suite="tests/emulated tests/model/test_families.py tests/model/test_padding.py tests/model/test_packing.py" # whose tests put everything on the device that is named
bars=(--row '*-liger' --row streambp-default) kernels='*' errors='*' families='*' methods='gpu'
case " ${others[*]-} " in *" --tiny "*) tiny=1 kernels='p* auto' errors='auto *kv' families=mamba2 methods='offloading or growth' bars=(--row checkpointing --row 'streambp-*') ;; esac
case " ${others[*]-} " in *" --device cpu "*) device=cpu ;; esac
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

limited() { timeout -k 5 "$limit" "$@"; }
rows() { # a script of tests/gpu and its own arguments; then those of every script. It begins no row in its last sixth.
    script=$1
    shift
    limited "$python" "tests/gpu/$script.py" --minutes "$minutes" "$@" ${others[@]+"${others[@]}"}
}
table() { # a benchmark: name, lengths, methods
    if [ $tiny = 1 ]; then
        limited "$python" -m "paper_repro.$1" --output "$folder/$step.csv" --minutes "$minutes" --device "$device" \
            --shape mini --lengths 64 --methods checkpointing streambp --chunk-size 24
    else
        # shellcheck disable=SC2086 # lists of words
        limited "$python" -m "paper_repro.$1" --output "$folder/$step.csv" --minutes "$minutes" --lengths $2 --methods $3
    fi
}
sized() { # attention's kernels at these head sizes
    sizes=()
    for size in "$@"; do sizes+=(--row "$kernels $size"); done
    rows op_rows "${sizes[@]}"
}
tests() { # of pytest
    timeout -s INT -k 20 "$limit" "$python" -m pytest -q -rf "$@" # interrupted, it tells what failed so far
}

run_step() {
    case $1 in
        device) rows device_rows ;;
        exact) rows exact_rows --row 'float64 qwen3' --row 'default*' --row stream --row dropout --row autocast ;;
        ops) rows op_rows --row "$kernels 128" --row 'sum *' ;;
        check) rows headline --row check --row 'check liger' ;;
        headline) rows headline --csv "$folder/headline.csv" "${bars[@]}" ;;
        default) rows default_rows --csv "$folder/default.csv" ;;
        limit) rows default_rows --row 'limit *' ;;
        ops_large) sized 192/128 256 512 ;;
        ops_small) sized 64 80 96 192 ;;
        setups) rows setup_rows ;;
        errors) rows report --row "plain $errors" --row "left* $errors" --row "packed $errors" --row "window $errors" ;;
        states) rows state_rows ;;
        offload) rows offload_rows --row '8B 65,536*' ;;
        offload_lora) rows offload_rows --row '8B LoRA*' ;;
        length_16k) table memory_and_time 16384 "streambp-liger trl-selective-liger $PEERS streambp checkpointing" ;;
        length_128k) table memory_and_time 131072 "streambp-lean-liger trl-offload-liger" ;;
        headline_plain) rows headline --row trl-selective --row streambp-lean --row checkpointing ;;
        peers) table memory_and_time 65536 "$PEERS" ;;
        two_layers) rows report --row '[0-9]*' ;;
        offload_full) rows offload_rows --row '4B full*' ;;
        offload_262k) rows offload_rows --row '8B 262,144' ;;
        errors_right) rows report --row "right* $errors" ;;
        suite) STREAMBP_TEST_DEVICE=$device tests -n 6 -m "not full and not gpu" $suite ;;
        pytest) tests -m "gpu and not full" tests -k "not precise and not test_rows and not peaks and ($methods)" ;;
        planner) tests -s -m gpu tests/gpu/test_planner.py ;;
        few_bits) rows few_bits_rows ;;
        exact_all) rows exact_rows --row "float64 $families" ;;
    esac
}

failed=0
for number in "${!steps[@]}"; do
    step=${steps[$number]%:*} limit=${steps[$number]#*:} file=$folder/${steps[$number]%:*}.txt
    limit=${LIMIT:-$limit}
    [ $tiny = 0 ] || limit=3600 # a rehearsal's guards against hangs alone: it may run on a busy machine
    if grep -qs '^exit code ' "$file"; then echo "== $step: done already"; continue; fi
    minutes=$(awk "BEGIN {print $limit / 72}")
    echo "== $step, $(date -u +%FT%TZ), $limit s at most"
    ( run_step "$step" ) 2>&1 | tee -a "$file"
    code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || grep -h 'FAILED' "$file" | cut -c 1-200 | sed 's/^/!! /'
    case $code in 124 | 137) echo "!! stopped after its $limit s" | tee -a "$file" ;; esac
    echo "exit code $code" | tee -a "$file"
    [ "$code" = 0 ] && continue
    failed=1
    rest=("${steps[@]:$((number + 1))}")
    if [ "${GO_ON:-0}" != 1 ] && [ ${#rest[@]} -gt 0 ]; then
        echo "!! $step failed with exit code $code: not begun are ${rest[*]%:*}. Name them, or set GO_ON=1, to run them all the same."
        break
    fi
done
exit $failed
