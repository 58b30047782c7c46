"""Image files, and where images stand in a text."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_language_models import as_png, picture

from effllm import UsageError
from effllm.runtime.images import image_file
from effllm.runtime.images.image_file import decode_image, read_image
from effllm.runtime.images.media_markers import content_parts, describe_markers, marker_digests, media_marker, render_with_media
from effllm.runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT
from effllm.runtime.templates.template import ChatTemplate, TemplateError

ONE, TWO = media_marker("1" * 32), media_marker("2" * 32)


def encoded(image, kind, **more) -> bytes:
    file = BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "JPEG"])
def test_formats_are_read(kind, tmp_path):
    points = np.full((20, 30, 3), (200, 30, 90), np.uint8)
    path = tmp_path / "one"
    path.write_bytes(encoded(Image.fromarray(points), kind))
    found = read_image(path)
    assert found.shape == (20, 30, 3) and found.dtype == np.uint8 and np.abs(found.astype(int) - points).max() < 12


def test_a_png_comes_back_as_it_was():
    assert np.array_equal(decode_image(as_png(picture(1)), "it"), picture(1))


def test_what_a_camera_says_of_its_side_is_heeded():
    points, exif = picture(2, 20, 30), Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the first row is the right side
    found = decode_image(encoded(Image.fromarray(points), "PNG", exif=exif), "it")
    assert np.array_equal(found, np.rot90(points, -1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_each_side_that_may_be_up_is_heeded_and_notes_that_are_damaged_are_not(kind):
    points = picture(3, 16, 24) // 8 * 8
    turned = {1: lambda it: it, 2: np.fliplr, 3: lambda it: np.rot90(it, 2), 4: np.flipud, 5: lambda it: np.rot90(np.fliplr(it)),
              6: lambda it: np.rot90(it, -1), 7: lambda it: np.rot90(np.fliplr(it), -1), 8: np.rot90, 9: lambda it: it}
    more = {"lossless": True} if kind == "WEBP" else {}
    plain = decode_image(encoded(Image.fromarray(points), kind, **more), "it")
    for number, turn in turned.items():
        exif = Image.Exif()
        exif[0x0112] = number
        found = decode_image(encoded(Image.fromarray(points), kind, exif=exif, **more), "it")
        assert np.array_equal(found, turn(plain)), number
    for damaged in (b"garbage", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x05\0\0\0\x1a"):
        data = encoded(Image.fromarray(points), kind, exif=b"Exif\0\0" + damaged, **more)
        assert np.array_equal(decode_image(data, "it"), plain)


def test_what_shines_through_is_on_white():
    image = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    image.putpixel((0, 0), (10, 20, 30, 255))
    found = decode_image(encoded(image, "PNG"), "it")
    assert found[0, 0].tolist() == [10, 20, 30] and (found[1] == 255).all()
    palette = Image.new("P", (4, 2), 0)
    palette.putpalette([9, 9, 9, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    found = decode_image(encoded(palette, "PNG", transparency=0), "it")
    assert found[0, 0].tolist() == [255] * 3 and found[0, 1].tolist() == [40, 50, 60]


def test_gray_is_read_in_eight_and_in_sixteen_bits():
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16)
    assert np.array_equal(decode_image(encoded(Image.fromarray(gray), "PNG"), "it")[..., 1], gray)
    deep = decode_image(encoded(Image.fromarray(gray.astype(np.uint16) * 257), "PNG"), "it")
    assert np.array_equal(deep[..., 0], gray)
    dark = decode_image(encoded(Image.fromarray(gray.astype(np.uint16)), "PNG"), "it")
    assert dark.max() == 0, "of 65,535 they are next to nothing"
    clear = decode_image(encoded(Image.fromarray(gray.astype(np.uint16) * 257), "PNG", transparency=257 * 7), "it")
    assert clear[0, 7].tolist() == [255] * 3 and np.array_equal(clear[1:, :, 2], gray[1:])


def test_numbers_that_do_not_say_what_is_white_are_guessed():
    gray = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    for values in (gray, gray * 255, gray * 65535, (gray * 65535).astype(np.int32)):
        found = decode_image(encoded(Image.fromarray(values), "TIFF"), "it")[..., 0]
        assert np.abs(found.astype(int) - np.arange(256).reshape(16, 16)).max() <= 1
    assert decode_image(encoded(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"), "it").max() == 0


@pytest.mark.parametrize("mode", ["CMYK", "LAB", "YCbCr"])
def test_other_colours_become_red_green_and_blue(mode):
    image = Image.new("LAB", (4, 2), (255, 128, 128)) if mode == "LAB" else Image.new("RGB", (4, 2), "white").convert(mode)
    assert decode_image(encoded(image, "TIFF"), "it").min() >= 253


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_of_many_frames_the_first_is_used(kind):
    first, *others = (Image.new("RGB", (8, 6), (20 * number, 250, 0)) for number in range(5))
    found = decode_image(encoded(first, kind, save_all=True, append_images=others), "it")
    assert found.shape == (6, 8, 3) and found[..., 0].max() < 12


@pytest.mark.parametrize("kind", ["EPS", "ICO", "ICNS", "PCX", "SGI"])
def test_formats_that_are_not_named_are_not_tried(kind, monkeypatch):
    """Of EPS no Ghostscript is started, however it could."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **more: pytest.fail("another program was asked"))
    with pytest.raises(UsageError, match="not a readable image"):
        decode_image(encoded(Image.new("RGB", (64, 64)), kind), "it")


@pytest.mark.parametrize("data", [b"", b"no picture", as_png(picture(1))[:200], b"\x89PNG\r\n\x1a\n" + b"\0" * 60])
def test_an_invalid_image_is_reported_in_one_line(data, tmp_path):
    path = tmp_path / "it.png"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a readable image") as caught:
        read_image(path)
    assert "\n" not in caught.value.message and "PNG" in caught.value.hint
    with pytest.raises(UsageError, match="No such file"):
        read_image(tmp_path / "absent.png")
    with pytest.raises(UsageError, match="Is a directory"):
        read_image(tmp_path)


@pytest.mark.parametrize(("data", "hint"), [
    (b"%PDF-1.7\n%\xe2", "pdftoppm"), (b"\0\0\0\x24ftypheic\0\0\0\0mif1", "heif-convert"), (b"<?xml version='1.0'?><svg/>", "rsvg-convert"),
    (b"\xff\x0a" + bytes(20), "djxl"), (b"\0\0\0\x0cJXL \r\n\x87\n", "djxl")])
def test_unsupported_image_formats_are_reported_with_how_to_convert_them(data, hint):
    with pytest.raises(UsageError, match="not a readable image") as caught:
        decode_image(data, "it")
    assert hint in caught.value.hint


@pytest.mark.parametrize(("name", "said"), [("https://a.org/fox.png", "is a URL"),
        ("data:image/png;base64," + 9000 * "iVBOR/", "is an image itself")])
def test_an_invalid_path_is_reported_in_one_line(name, said):
    with pytest.raises(UsageError, match=said) as caught:
        read_image(Path(name))
    assert len(caught.value.message) < 160


def test_a_file_may_not_claim_more_points_than_there_is_room_for(monkeypatch):
    """Some hundred bytes of white."""
    monkeypatch.setattr(image_file, "MOST_POINTS", 10_000)
    with pytest.raises(UsageError, match="more than 10,000"):
        decode_image(encoded(Image.new("1", (200, 51)), "PNG"), "it")
    assert decode_image(encoded(Image.new("1", (200, 50)), "PNG"), "it").shape == (50, 200, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UsageError, match="pixels"):
        decode_image(encoded(Image.new("1", (200, 50)), "PNG"), "it")
    monkeypatch.setattr(image_file, "MOST_BYTES", 100)
    with pytest.raises(UsageError, match="the limit for images"):
        decode_image(bytes(101), "it")


def test_a_text_with_marks_becomes_parts_and_is_readable():
    text = f"{ONE}\nWhat is this,\n{TWO} beside that?"
    assert marker_digests(text) == ["1" * 32, "2" * 32]
    assert content_parts(text) == [{"type": "image"}, {"type": "text", "text": "What is this,"}, {"type": "image"},
                              {"type": "text", "text": " beside that?"}]
    assert content_parts("\nonly words\n") == [{"type": "text", "text": "\nonly words\n"}]
    assert describe_markers(text) == "[image 11111111]\nWhat is this,\n[image 22222222] beside that?"


BOTH = ("{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %};{% endfor %}")
PARTS = ("{% for m in messages %}{{ m.role }}: {% for p in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
         "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %};{% endfor %}")
TEXT = "{% for m in messages %}{{ m.role + ': ' + m.content }};{% endfor %}"
PLACES = {IMAGE_INPUT: ("<image>",) * 2}
SENSING = ("{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ p.text if p.type == 'text' else '<' + p.type + '>' }}"
           "{% endfor %};{% endfor %}")


@pytest.mark.parametrize("template", [BOTH, PARTS, TEXT])
def test_templates_take_messages_in_their_own_way(template):
    messages = [{"role": "user", "content": f"{ONE}Who?"}, {"role": "assistant", "content": "A fox."}, {"role": "user", "content": "Why?"}]
    found = render_with_media(ChatTemplate(template).render, messages, PLACES)
    assert found == f"user: {ONE}Who?;assistant: A fox.;user: Why?;"


def test_a_template_without_a_place_for_images_says_so():
    lost = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(UsageError, match="no place for this image"):
        render_with_media(ChatTemplate(lost).render, [{"role": "user", "content": f"{ONE}Who?"}], PLACES)
    with pytest.raises(TemplateError, match="only words"):
        render_with_media(ChatTemplate("{{ raise_exception('only words') }}").render, [{"role": "user", "content": f"{ONE}Who?"}], PLACES)


@given(st.lists(st.sampled_from(["one", "image", "audio"]), min_size=1, max_size=6))
def test_images_and_audio_stand_in_a_prompt_in_the_given_order(kinds):
    pieces = [f"word{at}" if kind == "one" else media_marker(f"{at:032}", kind == "audio") for at, kind in enumerate(kinds)]
    places = PLACES | {AUDIO_INPUT: ("<audio>", "around <audio>")}
    messages = [{"role": "user", "content": "".join(pieces)}]
    assert render_with_media(ChatTemplate(SENSING).render, messages, places) == f"user: {''.join(pieces)};"
    plain = "".join(f"around {piece}" if kind == "audio" else piece for kind, piece in zip(kinds, pieces, strict=True))
    assert render_with_media(ChatTemplate(TEXT).render, messages, places) == f"user: {plain};"


def test_a_template_that_moves_audio_before_images_is_not_used():
    turned = ("{% for m in messages %}{% for kind in ('audio', 'image') %}{% for p in m.content if p.type == kind %}"
              "<{{ kind }}>{% endfor %}{% endfor %}{% endfor %}")
    with pytest.raises(UsageError, match="no place for these images or audio"):
        render_with_media(ChatTemplate(turned).render, [{"role": "user", "content": f"{ONE}{media_marker('2' * 32, True)}"}],
                 PLACES | {AUDIO_INPUT: ("<audio>",) * 2})
    with pytest.raises(UsageError, match="this conversation contains audio, which the model does not accept"):
        render_with_media(ChatTemplate(SENSING).render, [{"role": "user", "content": media_marker("2" * 32, True)}], PLACES)
