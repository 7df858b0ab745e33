#!/bin/sh
# The tests of kernels under compute-sanitizer: memory accesses, races in shared memory, barriers.
#     tests/gpu/sanitize.sh [PYTHON [TOOL ...]]      # tools: memcheck racecheck synccheck
# Exit status 0: nothing was found, 77: nothing was checked, anything else: see what is printed.
# Needs a GPU. initcheck is left out, as pages are handed out uninitialised on purpose.
cd "$(dirname "$0")/../.." || exit 1
python=${1:-python3}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- memcheck racecheck synccheck
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [ -z "$sanitizer" ]; then
    echo 'NOT CHECKED: compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin'
    exit 77
fi
# Without torch's cache each tensor is an allocation of its own: what is written behind its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Waits for as long as the program takes to import what it needs and to begin with the GPU.
run="$sanitizer --target-processes application-only --launch-timeout 0 --error-exitcode 99"
if ! $run "$python" -c 'import torch; print(torch.zeros(8, device="cuda").sum().item())'; then
    echo "NOT CHECKED: $sanitizer does not work with this GPU, driver or machine"
    exit 77
fi
failed=
for tool in "$@"; do
    # The others look at what threads of one program share.
    case $tool in
        memcheck) tests='not 7168 and (bfloat16-7 or bfloat16-1000 or int8-1000)' ;;
        *) tests='bfloat16-1000 or int8-1000' ;;
    esac
    # Block-scaled rows: a small case of each kernel.
    tests="$tests or (block_scaled and (columns or stored or (bfloat16 and 1000)))"
    echo "== $tool"
    $run --tool "$tool" "$python" -m pytest -v tests/gpu/test_kernels_against_reference.py \
        tests/gpu/test_block_scaled.py -k "$tests" || failed="$failed $tool"
done
[ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
