"""Protocol between ranks: control word, launch rule, messages."""
