#!/usr/bin/env bash
# Experts and long pipelines on the four or eight H200s of one host, in one call.
#
#   docs/lab/eight-gpus.sh FOLDER             measure; FOLDER gets records.jsonl and a log of each run
#   PLAN=1 docs/lab/eight-gpus.sh FOLDER      plan each run for H200s that need not be here
#
# GPUS=4 or 8 (8). LIMIT: seconds for all runs (3600). Each run has a time limit of its own, and one
# that fails does not stop the rest. PYTHON names the interpreter (python), which has mjax[cuda13]:
# without jax-triton a plan would be that of slower kernels.
set -uo pipefail
folder=${1:?the folder for records and logs}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && cd "$(dirname "$0")/../.." || exit 2
gpus=${GPUS:-8} limit=${LIMIT:-3600} python=${PYTHON:-python}
refuse() { echo "eight-gpus.sh: $1" >&2; exit 2; }
[ "$gpus" = 4 ] || [ "$gpus" = 8 ] || refuse "GPUS=$gpus: give 4 or 8"
"$python" -c 'import jax_triton, mjax' 2> /dev/null ||
    refuse "PYTHON=$python lacks mjax or jax-triton; pip install -e '.[cuda13]' there"
figures='^memory: train.remat=[^ ]+|estimate [0-9.]+ GB|estimate [0-9,]+ to [^:]+: [^,]+,[^,]+|^mjax: .*'
figures+='|"(ms|loss|memory_gb|tokens_per_second|gb_per_s)": [0-9.e-]+|^first step .*|^losses .*|.*TFLOP/s a device'

run() { # label, seconds, command ...
    local label=$1 most=$(($2 < limit - SECONDS ? $2 : limit - SECONDS)) log
    log="$folder/${1//[^a-zA-Z0-9]/-}.log"
    shift 2
    [ "$most" -gt 30 ] || { printf '%-50s no time left\n' "$label"; return; }
    timeout "$most" "$@" > "$log" 2>&1
    printf '%-50s exit %s: ' "$label" $?
    grep -oE "$figures" "$log" | uniq | tail -n 6 | cut -c1-200 | paste -sd ';'
}

step() { # label, config, override ...: a step, measured, or planned with PLAN=1
    local label=$1 config=configs/models/$2.yaml
    shift 2
    set -- data.mock=true data.seq_length=4096 train.micro_batch_size=1 "$@"
    if [ -n "${PLAN:-}" ]; then
        run "$label" 300 "$python" -m mjax.train --config "$config" "$@" --dry-run --no-compile \
            --on "h200:$gpus"
    else
        run "$label" 420 "$python" -m benchmarks.record --to "$folder/records.jsonl" --workload "$label" \
            train --steps 16 --warmup 4 --breakdown --config "$config" "$@"
    fi
}

tokens=(train.global_batch_size=$((8 * gpus))) # eight micro-batches a GPU
whole=(mesh.ep="$gpus" mesh.zero=1 "${tokens[@]}")
models="deepseek_v2_lite qwen3_30b_a3b mixtral_8x7b" small=()
if [ "$gpus" = 4 ]; then # they hold neither fp32 moments of 30 billion parameters nor Mixtral at all
    models="deepseek_v2_lite qwen3_30b_a3b"
    small=(optimizer.mu_dtype=bfloat16 optimizer.nu_dtype=bfloat16 train.remat=dots)
fi
balanced=model.moe.force_balanced=true
eight=(precision.fp8=delayed precision.fp8_experts=true)

for model in $models; do
    own=("${whole[@]}" "${small[@]}")
    [ "$model" = deepseek_v2_lite ] && own=("${whole[@]}")
    step "$model ep$gpus" "$model" "${own[@]}"
    step "$model ep$gpus, balanced" "$model" "${own[@]}" $balanced
    step "$model ep$gpus, FP8" "$model" "${own[@]}" "${eight[@]}"
    step "$model ep$gpus, all-to-all" "$model" "${own[@]}" train.expert_exchange=all_to_all
done

# The same 12 layers by four meshes. Losses of 20 steps, of new tokens in each, agree to 1e-3.
for mesh in "mesh.ep=$gpus mesh.zero=1" "mesh.ep=$gpus mesh.zero=3" \
    "mesh.ep=$((gpus / 2)) mesh.tp=2 mesh.zero=1" \
    "mesh.ep=$((gpus / 2)) mesh.pp=2 mesh.virtual_stages=2 mesh.zero=1"; do
    # shellcheck disable=SC2206  # each is several overrides
    own=($mesh "${tokens[@]}" model.num_hidden_layers=12 train.remat=dots)
    if [ -n "${PLAN:-}" ]; then
        step "12 layers of Qwen3, $mesh" qwen3_30b_a3b "${own[@]}"
    else
        run "12 layers of Qwen3, $mesh" 240 "$python" docs/lab/mesh_losses.py \
            configs/models/qwen3_30b_a3b.yaml data.mock=true data.seq_length=4096 \
            train.micro_batch_size=1 schedule.warmup_steps=20 "${own[@]}"
    fi
done
[ "$gpus" = 8 ] || step "qwen3_30b_a3b ep4, moments on the host" qwen3_30b_a3b "${whole[@]}" \
    optimizer.offload=true

[ -n "${PLAN:-}" ] && exit
# One layer and its exchange, one sequence a GPU.
for shape in mixtral h7168; do
    for exchange in auto all_to_all; do
        run "layer $shape, $exchange" 120 "$python" docs/lab/expert_layer.py "$shape" \
            train.expert_exchange=$exchange
    done
done
run "collectives" 120 "$python" -m mjax.bench collective --sizes 16,128,1024
