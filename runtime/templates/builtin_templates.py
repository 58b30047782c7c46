"""Chat templates for models that are published without one, though they were trained on a fixed prompt format."""

from __future__ import annotations

from collections.abc import Mapping

_PARTS = """{%- set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string else message['content'] -%}"""
_TEXT = """{%- for part in parts if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}"""
# PaliGemma: images, BOS, the question, and a newline.
PREFIX = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
""" + _TEXT + """
{{ '\\n' }}
{%- endfor -%}"""
# BLIP-2: images, BOS, then questions and answers in turns; without a question, the model describes the image.
QUESTION = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
{%- set asked -%}""" + _TEXT + """{%- endset -%}
{%- if message['role'] == 'assistant' -%}{{ ' ' + asked + ' ' }}
{%- elif asked -%}{{ 'Question: ' + asked + ' Answer:' }}{%- endif -%}
{%- endfor -%}"""
# GOT-OCR 2: a system message, pages between two special tokens, and the request (OCR:, OCR with format:) between two spaces.
PAGES = """{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>' }}
{%- endif -%}
{%- for message in messages -%}
""" + _PARTS + """
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- set pages = parts | selectattr('type', 'equalto', 'image') | list | length -%}
{%- if pages -%}{{ '<img>' + '<imgpad>' * pages + '</img>\\n ' }}{%- endif -%}
""" + _TEXT + """
{{ (' ' if pages else '') + '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
# DeepSeek-OCR 1 and 2: BOS, each page on a line of its own, and the request (Free OCR.); turns have no tokens.
LINES = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts -%}{{ '<image>\\n' if part['type'] == 'image' else part['text'] }}{%- endfor -%}
{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}
{%- endfor -%}"""
# Unlimited OCR: as above, but with all pages on one line, followed by the request (document parsing., Multi page parsing.).
SAME_LINE = LINES.replace("'<image>\\n'", "'<image>'")
# Whisper: the audio, and the beginning of the answer.
SOUND = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts if part['type'] == 'audio' -%}{{ '<|startoftranscript|>' }}{%- endfor -%}
{%- if message['role'] == 'assistant' -%}""" + _TEXT + """{%- endif -%}
{%- endfor -%}"""
BUILTIN_TEMPLATES: Mapping[str | None, str] = {"blip-2": QUESTION, "deepseek_ocr": LINES, "deepseek_ocr2": LINES, "got_ocr2": PAGES,
                                     "paligemma": PREFIX, "unlimited_ocr": SAME_LINE, "whisper": SOUND}  # by model type
