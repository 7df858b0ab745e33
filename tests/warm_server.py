"""The last import of the server that ranks are forked from: fills a cache and freezes its objects. Holds no tests."""

import gc

from megatron.training.command_line.flags import flag_table

flag_table()  # cached: each training program needs it
gc.collect()
# A collection in a rank would otherwise touch, and so copy, every page that the rank shares with the server.
gc.freeze()
