#!/bin/sh
# Ten minutes of one H100 or H200: parity, ledger, memory, a bench of GPT-2 124M in three rounds, a timeline.
#   PATH=.venv/bin:$PATH sh docs/gpu_day.sh [--dry_run]
# Results are in runs/gpu-day. A finished part is not repeated: start the script again to continue the others.
# At the end it prints the tables, and the table of docs/performance.md.
# GPU_DAY_SECONDS is the time. To try the script without a GPU:
#   GPU_DAY_PLATFORM=cpu GPU_DAY_SIZE=demo GPU_DAY_OPTIONS=--anyway sh docs/gpu_day.sh
set -u
results=${GPU_DAY_RESULTS:-runs/gpu-day} size=${GPU_DAY_SIZE:-gpt2-124m} seconds=${GPU_DAY_SECONDS:-600}
one="--platform ${GPU_DAY_PLATFORM:-gpu} --data.source synthetic"
work="--preset single --train.gradient_accumulation_steps 1 --train.batch_size 12"
begin=$(date +%s) dry=${1:-}
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # several processes share the GPU

left() { echo $((begin + seconds - $(date +%s))); }

part() {  # NAME SECONDS COMMAND...: at most SECONDS, and never beyond the end
  name=$1 limit=$2 rest=$(left); shift 2
  [ "$dry" ] && { echo "shardpair $*"; return; }
  [ -e "$results/$name.done" ] && return
  [ "$limit" -gt "$rest" ] && limit=$rest
  [ "$limit" -lt 5 ] && return
  [ -f "$results/$name/outcome.json" ] || rm -rf "${results:?}/$name"  # killed before it saved anything
  if [ -d "$results/$name" ]; then set -- "$1" --continue "$results/$name"; else set -- "$@" --run_dir "$results/$name"; fi
  echo "$name, at most $limit s: shardpair $*" >&2
  timeout -s INT -k 10 "$limit" shardpair "$@" > "$results/$name.txt" 2> "$results/$name.log" && touch "$results/$name.done"
}

[ "$dry" ] || mkdir -p "$results"
# Nothing is timed here, so these parts run at the same time. No fused kernel has float64: only JAX has blocks in it.
for core in float64:dense bfloat16:dense bfloat16:blockwise bfloat16:fused; do
  part check-${core%:*}-${core#*:} 170 check check $one --devices 1 --precision.dtype ${core%:*} --model.attention ${core#*:} &
done
part run-float64-blockwise 170 run check $one --preset single --precision.dtype float64 --model.attention blockwise \
  --engines jax-compiler jax-explicit jax-manual &
part ledger 170 ledger check $one --preset single &
part memory 170 memory demo $one --presets single --train.gradient_accumulation_steps 1 &
wait
# These parts have the GPU for themselves.
part bench $(($(left) - 45)) bench "$size" $one ${work#--preset single} ${GPU_DAY_OPTIONS:-} \
  --presets single --devices 1 --rounds 3 --windows 2 --cache_dir "$results/cache" \
  --engines nanogpt-loop torch-manual torch-library jax-compiler jax-manual --baseline nanogpt-loop \
  --variants layout.compile=inductor layout.compile=block
part profile 60 profile "$size" $one $work --engines torch-manual jax-compiler
[ "$dry" ] && exit

cat "$results"/*.txt
[ -d "$results/bench" ] && shardpair report "$results/bench" --json > "$results/bench.json"  # 1: rounds are missing
[ -s "$results/bench.json" ] && python3 - "$results/bench.json" << 'END'
import json, sys

rows = json.load(open(sys.argv[1]))["values"]["rows"].get("single", [])
compiled = [row["wall_ms"] for row in rows if row["label"] == "nanogpt-loop layout.compile=inductor"]
print("| engine | ms per step | over nanoGPT's loop | over the compiled loop | MFU | peak memory |")
print("|---|---:|---:|---:|---:|---:|")
for row in rows:
    ms, ratio, mfu = row["wall_ms"], row["wall_ratio"], row["mfu"]
    cells = [row["label"], f"{ms:.1f}", f"{ratio['median']:.2f}" if ratio else ""]
    cells += [f"{ms / of_loop:.2f}" for of_loop in compiled] or [""]
    print("|", " | ".join([*cells, f"{mfu:.0%}" if mfu else "", f"{row['peak_mem_bytes'] / 1e9:.3g} GB"]), "|")
END
missing=
for name in check-float64-dense run-float64-blockwise check-bfloat16-dense check-bfloat16-blockwise \
  check-bfloat16-fused ledger memory bench profile; do
  [ -e "$results/$name.done" ] || missing="$missing $name"
done
[ -z "$missing" ] && echo "all parts have finished" >&2 && exit
echo "failed, or no time was left:$missing. $results/NAME.log says why" >&2
exit 1
