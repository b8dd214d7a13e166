"""Helpers of the pipeline by hand: instructions, mailbox, one stage, deferred weight gradients."""
