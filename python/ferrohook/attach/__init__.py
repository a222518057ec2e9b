"""Attachment: wrapping and instrumenting modules, their calls in backward and in traces."""
