"""DeepSeek's own files: config.json and safetensors."""
