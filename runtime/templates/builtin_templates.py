"""Chat templates for models that are published without one, though they were trained on a fixed prompt format."""

from __future__ import annotations

from collections.abc import Mapping

_PARTS = """{%- set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string else message['content'] -%}"""
_TEXT = """{%- for part in parts if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}"""
# PaliGemma: pictures, the word that begins a text, what is asked, and the end of its line.
PREFIX = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
""" + _TEXT + """
{{ '\\n' }}
{%- endfor -%}"""
# BLIP-2: pictures, the word that begins a text, and a question and its answer in turns; nothing asked, it says what is to be seen.
QUESTION = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts if part['type'] == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
{%- set asked -%}""" + _TEXT + """{%- endset -%}
{%- if message['role'] == 'assistant' -%}{{ ' ' + asked + ' ' }}
{%- elif asked -%}{{ 'Question: ' + asked + ' Answer:' }}{%- endif -%}
{%- endfor -%}"""
# GOT-OCR 2: one system's message, pages between two words, and what is asked (OCR:, OCR with format:) between two spaces.
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
# DeepSeek-OCR 1 and 2: the word that begins a text, each page on a line of its own, and what is asked (Free OCR.); no words for turns.
LINES = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts -%}{{ '<image>\\n' if part['type'] == 'image' else part['text'] }}{%- endfor -%}
{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}
{%- endfor -%}"""
# Unlimited OCR: the same with pages one behind the other, and what is asked (document parsing., Multi page parsing.) behind them.
BESIDE = LINES.replace("'<image>\\n'", "'<image>'")
# Whisper: the sound, and what an answer begins with.
SOUND = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('there is no system role') }}{%- endif -%}
""" + _PARTS + """
{%- for part in parts if part['type'] == 'audio' -%}{{ '<|startoftranscript|>' }}{%- endfor -%}
{%- if message['role'] == 'assistant' -%}""" + _TEXT + """{%- endif -%}
{%- endfor -%}"""
BUILTIN_TEMPLATES: Mapping[str | None, str] = {"blip-2": QUESTION, "deepseek_ocr": LINES, "deepseek_ocr2": LINES, "got_ocr2": PAGES,
                                     "paligemma": PREFIX, "unlimited_ocr": BESIDE, "whisper": SOUND}  # by model type
