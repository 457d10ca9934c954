"""Laws of the readers of images and sounds: a source is read as a whole, or refused."""

import io
import tarfile

import pytest

from mjax.data.multimodal.sources import samples_of
from mjax.errors import UserError


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_that_lacks_its_end_is_refused_wherever_it_was_cut(tmp_path, form):
    file, borders = tmp_path / "a.tar", []
    with tarfile.open(file, "w", format=form) as tar:
        for name in ("a.jpg", "a.txt", "b" * 120 + ".jpg", "b" * 120 + ".txt", "c.txt"):
            member = tarfile.TarInfo(name)
            member.size = 700
            tar.addfile(member, io.BytesIO(b"x" * 700))
            borders.append(tar.offset)
    whole = file.read_bytes()
    assert [len(sample.name) for sample in samples_of(str(file), ["text"])] == [7, 126, 7]
    file.write_bytes(whole[: borders[-1] + 512])  # one block of zeros is an end, too
    assert len(samples_of(str(file), ["text"])) == 3
    damaged = bytearray(whole)
    damaged[borders[1] : borders[1] + 8] = b"\xff" * 8  # of the header of a member
    cuts = [whole[: border + more] for border in borders for more in (0, 100)]
    for cut in (*cuts, bytes(damaged)):
        file.write_bytes(cut)
        with pytest.raises(UserError, match=r"a\.tar cannot be read: .*; give a whole webdataset"):
            samples_of(str(file), ["text"])
