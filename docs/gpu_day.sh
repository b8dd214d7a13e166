#!/bin/sh
# Everything that wants a GPU, in one go; results in runs/gpu-day. About half an hour on one H100.
# A step whose folder is there is skipped: remove the folder of a step that failed, and start again.
#   PATH=.venv/bin:$PATH sh docs/gpu_day.sh [--dry_run]
set -u
results=runs/gpu-day
one="--platform gpu --devices 1"
short="--platform gpu --data.source synthetic --train.gradient_accumulation_steps 1"
engines="nanogpt-loop torch-manual torch-library plain-jit jax-compiler jax-manual"
failed=""

step() {  # NAME COMMAND...
  name=$1; shift
  [ -d "$results/$name" ] && return
  echo "$name: shardpair $*" >&2
  shardpair "$@" --run_dir "$results/$name" || failed="$failed $name"
}

[ "${1:-}" = --dry_run ] && step() { shift; echo "shardpair $*"; }
shardpair doctor
for dtype in float64 float32 bfloat16; do
  step check-$dtype check check $one --precision.dtype $dtype
done
step nanogpt check --against nanogpt --platform gpu
step ledger ledger check --platform gpu --preset single
step profile profile gpt2-124m $short --layout.dp_replicate 1 --train.batch_size 12
step memory memory demo --platform gpu --presets single
for size in 124m:12 350m:6; do
  step bench-${size%:*} bench gpt2-${size%:*} $short --presets single --devices 1 --engines $engines \
    --baseline nanogpt-loop --train.batch_size ${size#*:}
done
[ -z "$failed" ] && echo "all steps are done" >&2 || { echo "failed:$failed" >&2; exit 1; }
