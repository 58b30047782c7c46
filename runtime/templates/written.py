"""Chat templates of models that are published without one, though they were trained on one form of prompt alone."""

# PaliGemma: pictures, the word that begins a text, what is asked, and the end of its line.
PREFIX = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
{%- set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string else message['content'] -%}
{%- for part in parts if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
{%- for part in parts if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{{ '\\n' }}
{%- endfor -%}"""
