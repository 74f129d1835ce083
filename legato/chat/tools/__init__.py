"""Tools in chats: their request fields, the call formats of model families, and parsing of calls.

requests.py     `tools`, `tool_choice` and the like, checked
dialects.py     how each family of models writes calls, and which family a chat template is of
history.py      tools and earlier calls as the chat template wants them
json_text.py    whether a text is the beginning of a JSON value
call_reader.py  one call, read while it is written
parser.py       a whole text: content and calls, in pieces
enforcement.py  the grammar of a text that must be a call
tooling.py      all of that for one model
"""
