"""Install the built wheel with each extra in an environment of its own, and run what the extra is for. Then the sdist.

    python -m tests.project.packages DIST [--only EXTRA ...]

The environments see the torch of the interpreter that runs this, and nothing else of it: a copy per extra would be
gigabytes. Prints a line per extra. Exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODEL = "from transformers import LlamaConfig, LlamaForCausalLM; " + (
    "m = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, "
    "num_attention_heads=4)); "
)
SHARDED = "import torch, longspan; sp = longspan.SequenceSharding(longspan.init_mesh()); "
LOSS = "x = torch.arange(32)[None]; longspan.parallelize(m, sp, fsdp=False)(input_ids=x, labels=x).loss.backward()"
DIFFUSION = (
    "from diffusers import LatteTransformer3DModel as Latte; "
    "m = Latte(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, patch_size=2, "
    "sample_size=8, caption_channels=8, cross_attention_dim=16, video_length=2); x = torch.randn(1, 4, 2, 8, 8); "
    "longspan.parallelize(m, sp, fsdp=False)(x, torch.tensor([1]), torch.randn(1, 3, 8)).sample.sum().backward()"
)
ADAMW8BIT = (
    "import torch, torchao.optim; w = torch.nn.Parameter(torch.randn(64, 128)); "
    "o = torchao.optim.AdamW8bit([w]); w.square().sum().backward(); o.step()"
)
DOCS = "import runpy; runpy.run_path('docs/build_site.py', run_name='__main__')"
TRAIN = (
    "train sft --config examples/demo.yaml --context 256 --max_steps 2 --ring 1 --ulysses 2 --output_dir {out} "
    "--report_to "
)

USES: dict[str, list[str]] = {
    "": ["plan --help", "--version"],
    "hf": [f"-c {MODEL}{SHARDED}{LOSS}", "plan --model llama-3.1-8b --gpu h100 --gpus 8 --context 128k"],
    "train": [TRAIN + "tensorboard"],
    "peft": [f"-c {MODEL}{SHARDED}import peft; m = peft.get_peft_model(m, peft.LoraConfig()); {LOSS}"],
    "qlora": ["-c from bitsandbytes.nn import Linear4bit; Linear4bit(64, 64).to('cpu')"],
    "adamw8bit": [f"-c {ADAMW8BIT}"],
    "diffusers": [f"-c {SHARDED}{DIFFUSION}"],
    "trl": ["-c import longspan, trl; longspan.trainer(trl.SFTTrainer)"],
    "eval": ["-c import longspan.lm_eval, lm_eval"],
    **{name: [TRAIN + name] for name in ("trackio", "wandb", "mlflow")},
    "fla": ["-c from importlib.metadata import version; print(version('fla-core'))"],  # its kernels need a GPU
    "docs": [f"-c {DOCS}"],
    "all": [TRAIN + "none --optim adamw_torch_8bit", "-c import trl, lm_eval, diffusers, peft"],
}
"""By extra, arguments of `longspan`, or after `-c` code for Python."""

UNPINNED = {"trackio", "mlflow"}
"""Extras that exclude versions in constraints.txt (of Pillow, pandas and others), and so are not in `all`."""


def requirements_of_torch() -> list[str]:
    """Return the distributions that torch needs, with torch."""
    found, todo = set[str](), ["torch"]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            if ";" not in line:
                todo.append(line.split("=")[0].split("<")[0].split(">")[0].split("!")[0].split("[")[0].strip())
    return sorted(found)


def link_torch(site: Path) -> None:
    """Link the files of torch and of its requirements into an environment's packages."""
    for name in requirements_of_torch():
        for file in metadata.files(name) or []:
            top, source = site / file.parts[0], Path(str(file.locate())).parents[len(file.parts) - 2]
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to((source if len(file.parts) > 1 else Path(str(file.locate()))).resolve())


def check(extra: str, archive: Path, folder: Path) -> str | None:
    """Install one extra and use it; return the last lines of an error, or None."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    )
    link_torch(Path(site.stdout.strip()))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"WANDB_MODE": "offline"}
    name = f"{archive}[{extra}]" if extra else str(archive)
    pins = [] if extra in UNPINNED else ["--constraint", "constraints.txt"]
    commands = [[str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *pins, name]]
    for use in USES[extra]:
        use = use.format(out=folder / "out")
        commands.append(
            [str(python), "-c", use[3:]] if use.startswith("-c ") else [str(folder / "bin" / "longspan"), *use.split()]
        )
    for command in commands:
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if run.returncode:
            return "\n".join([" ".join(command), *(run.stderr or run.stdout).splitlines()[-5:]])
    return None


def main() -> int:
    """Check the extras named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(USES), default=list(USES))
    args = parser.parse_args()
    (wheel,), (sdist,) = args.dist.resolve().glob("*.whl"), args.dist.resolve().glob("*.tar.gz")
    # pip builds a wheel from the sdist; `train` shows that the extras come with it.
    jobs = [(extra, wheel) for extra in args.only] + [(extra, sdist) for extra in args.only if extra in ("", "train")]
    failed = 0
    for extra, archive in jobs:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="longspan-package-") as folder:
            problem = check(extra, archive, Path(folder) / "env")
        failed += problem is not None
        name = (f"longspan[{extra}]" if extra else "longspan") + (", sdist" if archive == sdist else "")
        print(f"{name:24}{'FAILED' if problem else 'works'} ({time.monotonic() - start:.0f} s)", flush=True)
        if problem:
            print(problem, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
