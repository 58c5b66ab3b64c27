"""The families that come with longspan. `longspan.plan.models.family` says how to add one.

Defaults are those of the config classes in transformers 5. Tests compare every weight with transformers' own modules.
"""

from longspan.plan.models.families import deepseek, gpt, llama, minimax, qwen
from longspan.plan.models.family import register

for _module in (deepseek, gpt, llama, minimax, qwen):
    for _model_type, _family in _module.FAMILIES.items():
        register(_model_type, _family)
