"""Evaluate a sharded model with EleutherAI's lm-evaluation-harness: `python -m longspan.lm_eval run ...`.

- `model`: the harness's model class, registered as "longspan".
- `__main__`: the harness's command line on as many ranks as `--model_args` name.
"""
