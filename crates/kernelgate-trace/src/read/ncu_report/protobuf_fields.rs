//! Fields of protobuf messages, read from their bytes.

/// A message whose fields have not been read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ProtobufMessage<'a>(pub &'a [u8]);

/// The value of a field, as far as the encoding says what it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum WireValue<'a> {
    /// A varint field: whole number, enumeration or truth value.
    Number(u64),
    /// A number of 32 bits, such as a float.
    Bits32(u32),
    /// A number of 64 bits, such as a double.
    Bits64(u64),
    /// A length-delimited field: text, bytes or a message.
    Bytes(&'a [u8]),
}

impl<'a> ProtobufMessage<'a> {
    /// All fields with their numbers in written order, up to the first broken field.
    pub fn all_fields(self) -> impl Iterator<Item = (u64, WireValue<'a>)> {
        let mut rest = self.0;
        std::iter::from_fn(move || read_wire_field(&mut rest))
    }

    fn last_field(self, number: u64) -> Option<WireValue<'a>> {
        self.all_fields().filter(|(of, _)| *of == number).map(|(_, value)| value).last()
    }

    /// A whole number.
    pub fn integer_field(self, number: u64) -> Option<u64> {
        match self.last_field(number)? {
            WireValue::Number(value) => Some(value),
            _ => None,
        }
    }

    /// Returns a message field, or an empty message if it is missing.
    pub fn message_field(self, number: u64) -> Self {
        match self.last_field(number) {
            Some(WireValue::Bytes(bytes)) => Self(bytes),
            _ => Self::default(),
        }
    }

    /// Returns a text field, or an empty text if it is missing.
    pub fn text_field(self, number: u64) -> String {
        String::from_utf8_lossy(self.message_field(number).0).into_owned()
    }

    /// Every value of a repeated field that has bytes.
    pub fn repeated_field(self, number: u64) -> impl Iterator<Item = Self> {
        self.all_fields().filter_map(move |(of, value)| match value {
            WireValue::Bytes(bytes) if of == number => Some(Self(bytes)),
            _ => None,
        })
    }
}

fn read_wire_field<'a>(rest: &mut &'a [u8]) -> Option<(u64, WireValue<'a>)> {
    let key = read_varint(rest)?;
    let value = match key & 7 {
        0 => WireValue::Number(read_varint(rest)?),
        1 => WireValue::Bits64(u64::from_le_bytes(take_bytes(rest, 8)?.try_into().ok()?)),
        2 => {
            let length = usize::try_from(read_varint(rest)?).ok()?;
            WireValue::Bytes(take_bytes(rest, length)?)
        }
        5 => WireValue::Bits32(u32::from_le_bytes(take_bytes(rest, 4)?.try_into().ok()?)),
        _ => return None,
    };
    Some((key >> 3, value))
}

fn read_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *take_bytes(rest, 1)?.first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn take_bytes<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, behind) = rest.split_at_checked(length)?;
    *rest = behind;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protobuf_fields_are_decoded_as_the_format_specifies() {
        // 1: 300, 2: "ab", 3: a message with 1: 5, 4: 1.5 as float, 5: 2.5 as double.
        let mut bytes = vec![0x08, 0xac, 0x02, 0x12, 2, b'a', b'b', 0x1a, 2, 0x08, 5, 0x25];
        bytes.extend(1.5f32.to_le_bytes());
        bytes.push(0x29);
        bytes.extend(2.5f64.to_le_bytes());
        let message = ProtobufMessage(&bytes);
        assert_eq!(message.integer_field(1), Some(300));
        assert_eq!(message.text_field(2), "ab");
        assert_eq!(message.message_field(3).integer_field(1), Some(5));
        assert_eq!(message.last_field(4), Some(WireValue::Bits32(1.5f32.to_bits())));
        assert_eq!(message.last_field(5), Some(WireValue::Bits64(2.5f64.to_bits())));
        assert_eq!((message.integer_field(9), message.text_field(9)), (None, String::new()));
    }

    #[test]
    fn a_truncated_protobuf_message_gives_its_complete_fields() {
        let bytes = [0x08, 1, 0x12, 200, b'a'];
        assert_eq!(ProtobufMessage(&bytes).all_fields().count(), 1);
        assert_eq!(ProtobufMessage(&[0xff; 20]).all_fields().count(), 0);
    }
}
