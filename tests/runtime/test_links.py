"""Bundles whose files are symbolic links."""

from __future__ import annotations

import pytest
from links import KINDS, bundle_of_links

from pass_runtime import GenerateOptions, PassError, load


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_bundle_of_links_opens(random_bundle, tmp_path, kind, absolute):
    def token_ids(bundle):
        with load(bundle) as session:
            return session.generate("The", GenerateOptions(max_new_tokens=8)).result().token_ids

    copy = bundle_of_links(random_bundle, tmp_path, kind, absolute)
    assert token_ids(copy) == token_ids(random_bundle)
    trunk = next(path for path in sorted(copy.iterdir()) if path.name.endswith(".onnx.data"))
    content = bytearray(trunk.read_bytes())
    content[100] ^= 1
    trunk.resolve().write_bytes(bytes(content))
    with pytest.raises(PassError, match="does not match its SHA-256"):
        token_ids(copy)
    trunk.resolve().unlink()
    with pytest.raises(PassError, match="is missing"):
        token_ids(copy)
