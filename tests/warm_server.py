"""The last import of the server that ranks are forked from: fills a cache and freezes all objects. No tests."""

import gc

from megatron.training.command_line.flags import flag_table

flag_table()  # fills the cache: each training program needs the table
gc.collect()
# Otherwise a garbage collection in a rank would write to, and so copy, every page that it shares with the server.
gc.freeze()
