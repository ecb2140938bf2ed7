#!/bin/sh
# The gRPC API from a shell: what there is (by reflection), an answer, token ids. Needs grpcurl.
#   sh grpcurl.sh [127.0.0.1:50051]
set -eu
target=${1:-127.0.0.1:50051}
api=tandem.v1.InferenceService
grpcurl -plaintext "$target" list "$api"
grpcurl -plaintext -d '{"text": "In the beginning", "sampling": {"max_tokens": 4}}' "$target" "$api/Generate"
grpcurl -plaintext -d '{"text": "In the beginning"}' "$target" "$api/Tokenize"
