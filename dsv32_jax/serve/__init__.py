"""An HTTP server over the engine, with the endpoints of OpenAI's API.

`POST /v1/chat/completions` and `POST /v1/completions`, whole or streamed, `GET /v1/models`, `/health` (open to all; 503
while the server stops or once the engine has failed) and `/metrics`. Errors have OpenAI's form.

What differs from OpenAI's API:

- A field that would have no effect is an error that names it; its value that asks for nothing is accepted. So are
  `user` and `metadata`. Not supported are penalties, `logit_bias`, `top_logprobs` above 0, forced tool choice, strict
  schemas (the model is told a schema, nothing holds it to it), `echo`, `suffix`, `best_of` and several prompts at once.
- `thinking: {"type": "enabled"}` or `chat_template_kwargs: {"thinking": true}` lets the model reason first;
  `reasoning_content` is apart from `content`. `top_k` is there. Stop strings end the reasoning and calls too.
- Log-probabilities are under the distribution that tokens are drawn from: after temperature, top-k and top-p.
- A choice whose message breaks the format has `problems`. A streamed call that turns out broken has been sent by then;
  its arguments are no valid JSON.
- A seed is in [0, 2^32); choice i of n has the seed plus i. Its draws depend on the seed and position alone, but
  its logits are the same to rounding only, which can tip a close draw: other requests change the width of page tables,
  and preemption and reused prefixes change which step computes a row.
- Once a stream has begun, an error is its last event, in place of `[DONE]`.

Limits: a full queue is 429, a slow request 504, and a request whose client leaves some 1000 tokens unread is cancelled,
as the engine can not pause a text. A client that leaves frees its slots at once.

With a Hugging Face tokenizer, text that spells a special token such as `<｜User｜>` becomes that token, as officially:
users of a public server can forge turns that way.
"""
