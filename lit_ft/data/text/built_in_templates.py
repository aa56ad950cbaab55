"""Chat templates for tokenizers without one of their own."""

_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if loop.length == 1 %}{{ raise_exception('a system prompt alone has no turn to go into') }}{% endif %}
{%- else %}
{%- set before = messages[0].content | trim + '\\n\\n' if loop.index0 == 1 and messages[0].role == 'system' else '' %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + before }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_PLAIN = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token + '\\n' }}
{%- else %}{{ message.role | capitalize + ': ' + message.content + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

BUILT_IN = {"chatml": _CHATML, "llama3": _LLAMA3, "gemma": _GEMMA, "plain": _PLAIN}
