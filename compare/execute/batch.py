"""A batch script of SLURM, which continues from the newest checkpoints after its time limit."""

import shlex

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=shardpair
{requests}
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

turn=${{SLURM_RESTART_COUNT:-0}}
run=runs/${{SLURM_JOB_ID:?}}
if [ -f "$run/outcome.json" ]; then
  shardpair {study} --continue "$run" {how}
else
  rm -rf "$run"  # killed at its start
  {line} --run_dir "$run"
fi
case $? in 4) [ "$turn" -lt 20 ] && scontrol requeue "$SLURM_JOB_ID" ;; esac
"""
LEFT_OUT = ("--dry_run", "--json")


def requests(nodes: int, gpus: int) -> list[str]:
    """The options of `salloc` and `sbatch` for hosts with this many GPUs each."""
    return [f"--nodes={nodes}", *([f"--gpus-per-node={gpus}"] if gpus else [])]


def batch_script(line: str, *, nodes: int, gpus: int = 0, options: tuple[str, ...] = ()) -> str:
    """A script for `sbatch` that runs a command line of shardpair with --launcher slurm.

    Hosts are `nodes`, with `gpus` each; `options` are of `srun`.
    """
    words = [word for word in shlex.split(line) if word.replace("dry-run", "dry_run") not in LEFT_OUT]
    how = ["--launcher", "slurm"]
    how += [f"--launcher_options={shlex.join(options)}"] if options else []
    return SCRIPT.format(
        requests="\n".join(f"#SBATCH {request}" for request in requests(nodes, gpus)),
        line=shlex.join(words),
        study="run" if words[1] == "resume" else words[1],
        how=shlex.join(how),
    )
