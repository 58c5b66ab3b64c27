"""The families that come with longspan: one file each, or one for a few that are kin. Defaults are those of the config
classes in transformers 5; tests compare every weight with transformers' own modules.
"""

from longspan.plan.models.families import deepseek, gemma, gpt, llama, minimax, qwen
from longspan.plan.models.family import register

for _module in (deepseek, gemma, gpt, llama, minimax, qwen):
    for _model_type, _family in _module.FAMILIES.items():
        register(_model_type, _family)
