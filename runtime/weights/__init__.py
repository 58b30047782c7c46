"""A model's weights at run time, on any tier: records for the ops, streamed parts, paged experts, GPU layers."""
