#!/bin/sh
# compute-sanitizer over one small multiply for each family, decomposition and row tile of the table.
#   tools/sanitize.sh                          memcheck, racecheck, synccheck and initcheck
#   tools/sanitize.sh -t memcheck -s 60        one tool, at most 60 s of cases
#   tools/sanitize.sh -k '*_streamk_*'         kernels whose name matches
#   tools/sanitize.sh -t racecheck -o logs     keeps what each tool wrote as logs/TOOL.log
# racecheck needs nvcc: it runs kernels of its own, built into build/racecheck with -DMC_RACECHECK (hopper_config.cuh says what that changes).
# -s is the time of the cases of each tool (default 60); starting up under a tool adds some 20 s.
# Exit status: 0 clean, 1 a tool complains or a result is wrong, 2 the tool cannot run here.
set -u
tools="memcheck racecheck synccheck initcheck" seconds=60 pattern='*' python=${PYTHON:-python3} logs=
while getopts t:s:k:p:o: option; do
  case $option in
    t) tools=$OPTARG ;;
    s) seconds=$OPTARG ;;
    k) pattern=$OPTARG ;;
    p) python=$OPTARG ;;
    o) mkdir -p "$OPTARG" && logs=$(cd "$OPTARG" && pwd) || exit 2 ;;
    *) sed -n '2,9p' "$0"; exit 2 ;;
  esac
done
# Paths are meant from where the script was called.
absolute() { case $1 in */*) case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac ;; *) echo "$1" ;; esac; }
python=$(absolute "$python") given=${MARLIN_CUTLASS_BUILD:-}
case $given in "" | /*) ;; *) given=$PWD/$given ;; esac
[ -z "${SANITIZER:-}" ] || SANITIZER=$(absolute "$SANITIZER")
cd "$(dirname "$0")/.." || exit 2
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
if [ ! -x "$sanitizer" ]; then
  echo "compute-sanitizer was not found: set SANITIZER to its path" >&2
  exit 2
fi
# Each tensor has its own allocation, so that memcheck sees where it ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. MARLIN_CUTLASS_JIT=0
build_for_racecheck() {
  names=$(MARLIN_CUTLASS_BUILD=$given "$python" tools/sanitize_cases.py --filter "$pattern" --list) || return
  [ -n "$names" ] || { echo "no kernel matches $pattern" >&2; return 1; }
  # shellcheck disable=SC2086
  NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} -DMC_RACECHECK" "$python" build.py --arch native --out build/racecheck $names
}
status=0
for tool in $tools; do
  echo "== $tool"
  build=$given
  if [ "$tool" = racecheck ]; then
    build_for_racecheck || { echo "racecheck: not run" >&2; [ $status -ne 0 ] || status=2; continue; }
    build=$PWD/build/racecheck
  fi
  log=${logs:+$logs/$tool.log}
  log=${log:-$(mktemp)}
  # shellcheck disable=SC2086
  MARLIN_CUTLASS_BUILD=$build timeout $((seconds + 180)) "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    --target-processes application-only --kernel-name kernel_substring=w4a16_ \
    "$python" tools/sanitize_cases.py --filter "$pattern" --seconds "$seconds" >"$log" 2>&1
  code=$?
  grep -E '^========= (ERROR SUMMARY|RACECHECK SUMMARY)|^wrong|cases, ' "$log"
  if [ $code -ne 0 ]; then
    echo "$tool: exit status $code; its last lines:"
    tail -n 40 "$log"
    status=1
  fi
  [ -n "$logs" ] || rm -f "$log"
done
exit $status
