"""Protocol between ranks: control word, messages, readiness of buckets."""
