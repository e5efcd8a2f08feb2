"""The official format's special texts and the tags made of them."""

# DeepSeek-V3.2, encoding/encoding_dsv32.py and tokenizer.json: full-width bars, U+2581 for spaces.
BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"

CALLS = f"<{DSML}function_calls"
CALLS_END = f"</{DSML}function_calls"
INVOKE = f"<{DSML}invoke"
INVOKE_END = f"</{DSML}invoke"
PARAMETER = f"<{DSML}parameter"
PARAMETER_END = f"</{DSML}parameter"
NAME = ' name="'
TEXT_VALUE = '" string="true">'
JSON_VALUE = '" string="false">'

RESULTS = "<function_results>"
RESULTS_END = "</function_results>"

# A model's own text holds none of these: they would open or close something in the next prompt.
CONTROL = (BOS, EOS, THINK_START, THINK_END, DSML)
THINKING_MODES = ("chat", "thinking")
