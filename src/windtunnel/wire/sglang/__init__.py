"""SGLang on the wire: codecs, request models and errors."""
