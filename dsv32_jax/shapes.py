"""Legend of the letters that end the names of tensors and stand in their annotations.

B batch (rows of tokens)      T query tokens            S key tokens           N = B*T flat tokens
D model dim                   Q q_lora_rank             C kv_lora_rank         R rope dim
P nope dim                    H attention heads         U value head dim       K selected keys
J indexer heads               X indexer head dim        E experts              A experts per token
G expert groups               F feed-forward dim        V vocabulary           L stacked layers
M rows sorted by expert       W vocabulary chunk

`q_THD` is an array [T, H, D]; inside an op D may be any inner dimension, as in the op's own docstring.
"""
