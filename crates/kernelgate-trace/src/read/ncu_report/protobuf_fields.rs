//! Decodes fields of protobuf messages from bytes, without a schema.

/// The bytes of a protobuf message, decoded when a field is requested.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ProtobufMessageBytes<'a>(pub &'a [u8]);

/// The value of a protobuf field, as far as the wire type determines its type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ProtobufWireValue<'a> {
    /// A varint field: integer, enumeration or boolean.
    Varint(u64),
    /// A 32-bit field, such as a float.
    Bits32(u32),
    /// A 64-bit field, such as a double.
    Bits64(u64),
    /// A length-delimited field: text, bytes or a nested message.
    LengthDelimited(&'a [u8]),
}

impl<'a> ProtobufMessageBytes<'a> {
    /// Iterates over number and value of all fields in file order, and stops at the first field
    /// that cannot be decoded.
    pub fn fields_until_first_broken(self) -> impl Iterator<Item = (u64, ProtobufWireValue<'a>)> {
        let mut rest = self.0;
        std::iter::from_fn(move || decode_next_field(&mut rest))
    }

    fn last_value_of_field(self, number: u64) -> Option<ProtobufWireValue<'a>> {
        self.fields_until_first_broken()
            .filter(|(of, _)| *of == number)
            .map(|(_, value)| value)
            .last()
    }

    /// A whole number.
    pub fn integer_field_if_present(self, number: u64) -> Option<u64> {
        match self.last_value_of_field(number)? {
            ProtobufWireValue::Varint(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the nested message in a field, or an empty message if the field is missing.
    pub fn nested_message_or_empty(self, number: u64) -> Self {
        match self.last_value_of_field(number) {
            Some(ProtobufWireValue::LengthDelimited(bytes)) => Self(bytes),
            _ => Self::default(),
        }
    }

    /// Returns the text in a field, or an empty text if the field is missing.
    pub fn text_field_or_empty(self, number: u64) -> String {
        String::from_utf8_lossy(self.nested_message_or_empty(number).0).into_owned()
    }

    /// Iterates over all length-delimited values of a repeated field.
    pub fn nested_messages_of_repeated_field(self, number: u64) -> impl Iterator<Item = Self> {
        self.fields_until_first_broken().filter_map(move |(of, value)| match value {
            ProtobufWireValue::LengthDelimited(bytes) if of == number => Some(Self(bytes)),
            _ => None,
        })
    }
}

fn decode_next_field<'a>(rest: &mut &'a [u8]) -> Option<(u64, ProtobufWireValue<'a>)> {
    let key = decode_varint(rest)?;
    let value = match key & 7 {
        0 => ProtobufWireValue::Varint(decode_varint(rest)?),
        1 => ProtobufWireValue::Bits64(u64::from_le_bytes(
            take_first_bytes(rest, 8)?.try_into().ok()?,
        )),
        2 => {
            let length = usize::try_from(decode_varint(rest)?).ok()?;
            ProtobufWireValue::LengthDelimited(take_first_bytes(rest, length)?)
        }
        5 => ProtobufWireValue::Bits32(u32::from_le_bytes(
            take_first_bytes(rest, 4)?.try_into().ok()?,
        )),
        _ => return None,
    };
    Some((key >> 3, value))
}

fn decode_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *take_first_bytes(rest, 1)?.first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

fn take_first_bytes<'a>(rest: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, behind) = rest.split_at_checked(length)?;
    *rest = behind;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protobuf_fields_of_each_wire_type_are_decoded() {
        // Test message: field 1 is 300, field 2 is "ab", field 3 a message with field 1 = 5, field
        // 4 the float 1.5, field 5 the double 2.5.
        let mut bytes = vec![0x08, 0xac, 0x02, 0x12, 2, b'a', b'b', 0x1a, 2, 0x08, 5, 0x25];
        bytes.extend(1.5f32.to_le_bytes());
        bytes.push(0x29);
        bytes.extend(2.5f64.to_le_bytes());
        let message = ProtobufMessageBytes(&bytes);
        assert_eq!(message.integer_field_if_present(1), Some(300));
        assert_eq!(message.text_field_or_empty(2), "ab");
        assert_eq!(message.nested_message_or_empty(3).integer_field_if_present(1), Some(5));
        assert_eq!(
            message.last_value_of_field(4),
            Some(ProtobufWireValue::Bits32(1.5f32.to_bits()))
        );
        assert_eq!(
            message.last_value_of_field(5),
            Some(ProtobufWireValue::Bits64(2.5f64.to_bits()))
        );
        assert_eq!(
            (message.integer_field_if_present(9), message.text_field_or_empty(9)),
            (None, String::new())
        );
    }

    #[test]
    fn complete_fields_of_a_truncated_message_are_decoded() {
        let bytes = [0x08, 1, 0x12, 200, b'a'];
        assert_eq!(ProtobufMessageBytes(&bytes).fields_until_first_broken().count(), 1);
        assert_eq!(ProtobufMessageBytes(&[0xff; 20]).fields_until_first_broken().count(), 0);
    }
}
