//! Compares drawings with their structure: how many shapes, which texts, in which order along an
//! axis; never byte by byte.

use super::*;
use regex::Regex;

fn curves_chart(kind: ScaleKind) -> ChartWithTitle {
    let series = |name: &str, colour: usize, scale: f64| CurveSeries {
        name: name.to_owned(),
        colour,
        joined: true,
        marks: [1.0, 2.0, 4.0, 8.0]
            .map(|s| CurveMark {
                x: 512.0 * s,
                y: 1e5 * s * scale,
                range: (9e4 * s * scale, 2e5 * s * scale),
            })
            .to_vec(),
    };
    let ticks = [512.0, 1024.0, 2048.0, 4096.0];
    ChartWithTitle {
        title: "attention/forward over s".to_owned(),
        subtitle: "d128 causal bf16, hot".to_owned(),
        body: ChartBody::Xy(Xy {
            x: ChartAxis::new("s", PlottedUnit::Count, ScaleKind::Log).with_ticks(ticks),
            y: ChartAxis::new("time of a launch", PlottedUnit::Time, kind),
            series: vec![series("cuda/flash", 0, 1.0), series("cuda/<naive> & \"co\"", 1, 30.0)],
            guides: vec![GuideLine {
                name: "limit".to_owned(),
                points: vec![(512.0, 5e4), (4096.0, 4e5)],
            }],
            broad: false,
        }),
    }
}

fn rows_chart() -> ChartWithTitle {
    let row = |i: usize| LabelledRow {
        label: format!("family/operation/{}", "long_".repeat(40 * (i % 2)) + &i.to_string()),
        value: "+1.0%".to_owned(),
        marks: vec![
            ChartRowMark::Interval(0.9, 1.0 + i as f64 / 10.0, 1.5, 0),
            ChartRowMark::Tick(1.0),
            ChartRowMark::Dots(vec![1.0, 1.1], 1),
        ],
    };
    ChartWithTitle {
        title: "Change".to_owned(),
        subtitle: String::new(),
        body: ChartBody::Rows(LabelledRows {
            axis: ChartAxis::new("change of the time", PlottedUnit::Change, ScaleKind::Linear),
            legend: vec!["interval".to_owned(), "runs".to_owned()],
            rows: (0..5).map(row).collect(),
            origin: Some(1.0),
        }),
    }
}

fn heat_map_chart() -> ChartWithTitle {
    ChartWithTitle {
        title: "st_bif/forward".to_owned(),
        subtitle: "time".to_owned(),
        body: ChartBody::Heat(HeatMap {
            columns: vec!["4".to_owned(), "8".to_owned()],
            rows: vec!["b8".to_owned(), "b16".to_owned()],
            cells: vec![vec![Some(1e3), Some(2e3)], vec![None, Some(8e3)]],
            quantity: PlottedUnit::Time,
            names: ("t".to_owned(), "b".to_owned()),
        }),
    }
}

fn count_tags(svg: &str, tag: &str) -> usize {
    svg.matches(&format!("<{tag} ")).count()
}

fn svg_texts(svg: &str) -> Vec<String> {
    let text = Regex::new("<text[^>]*>([^<]*)</text>").unwrap();
    text.captures_iter(svg).map(|found| found[1].to_owned()).collect()
}

/// Numbers of an attribute of the shapes that have a colour.
fn shape_numbers(svg: &str, tag: &str, attribute: &str, colour: colour::PurposeColour) -> Vec<f64> {
    let colour = colour::hex(colour.rgb());
    let shape = Regex::new(&format!("<{tag} [^>]*{colour}[^>]*>")).unwrap();
    let number = Regex::new(&format!(r#" {attribute}="(-?[\d.]+)""#)).unwrap();
    shape
        .find_iter(svg)
        .map(|shape| number.captures(shape.as_str()).unwrap()[1].parse().unwrap())
        .collect()
}

#[test]
fn a_curve_has_a_mark_for_every_value_in_order() {
    for kind in [ScaleKind::Log, ScaleKind::FromZero] {
        let svg = curves_chart(kind).svg().unwrap();
        assert_eq!(count_tags(&svg, "circle"), 8);
        for series in [0, 1] {
            let coordinates = |attribute| {
                shape_numbers(&svg, "circle", attribute, colour::PurposeColour::Series(series))
            };
            assert_eq!(coordinates("cx").len(), 4);
            assert!(coordinates("cx").is_sorted_by(|a, b| a < b), "to the right");
            assert!(coordinates("cy").is_sorted_by(|a, b| a > b), "upwards");
        }
        // The slower implementation is higher up, and a logarithmic axis has equal steps for
        // doublings.
        let cy =
            |series| shape_numbers(&svg, "circle", "cy", colour::PurposeColour::Series(series));
        assert!(cy(0).iter().zip(cy(1)).all(|(fast, slow)| slow < *fast));
        let cx = shape_numbers(&svg, "circle", "cx", colour::PurposeColour::Series(0));
        assert!((cx[1] - cx[0] - (cx[3] - cx[2])).abs() <= 1.0, "{cx:?}");
        let texts = svg_texts(&svg);
        let expected =
            ["attention/forward over s", "512", "4096", "limit", "cuda/flash", "time of a launch"];
        expected
            .iter()
            .for_each(|text| assert!(texts.iter().any(|it| it == text), "{text}: {texts:?}"));
        assert!(texts.iter().any(|text| text.ends_with(" ms")), "{texts:?}");
    }
}

#[test]
fn foreign_text_in_a_drawing_is_escaped() {
    let svg = curves_chart(ScaleKind::Log).svg().unwrap();
    assert!(svg.contains("cuda/&lt;naive&gt; &amp; &quot;co&quot;") && !svg.contains("<naive>"));
    let mut chart = heat_map_chart();
    chart.title = "a\u{1b}[31m\u{0}b".to_owned();
    let svg = chart.svg().unwrap();
    assert!(!svg.contains(['\u{1b}', '\u{0}']), "{svg}");
}

#[test]
fn chart_rows_have_labels_and_stay_inside_the_picture() {
    let chart = rows_chart();
    let svg = chart.svg().unwrap();
    // The dot of the interval, and two dots of the runs.
    assert_eq!(count_tags(&svg, "circle"), 15);
    let at = shape_numbers(&svg, "circle", "cx", colour::PurposeColour::Series(0));
    assert!(at.is_sorted_by(|a, b| a < b), "{at:?}");
    assert!(
        svg_texts(&svg).iter().any(|text| text.contains('…')),
        "longer than the drawing is wide"
    );
    assert_shapes_inside(&chart.layout());
}

fn assert_shapes_inside(picture: &VectorPicture) {
    for shape in &picture.shapes {
        let PictureShape::Text { x, text, size, anchor, .. } = shape else { continue };
        let width = font::text_width(text, *size);
        let left = match anchor {
            TextAnchor::Start => *x,
            TextAnchor::Middle => x - width / 2.0,
            TextAnchor::End => x - width,
        };
        assert!(left >= 0.0 && left + width <= picture.width, "{text} at {left}");
    }
}

#[test]
fn long_labels_are_wrapped_and_leave_room_for_the_marks() {
    let labels = [
        "s200_d64_causal_bf16_outliers_tokens1600 cuda/flash_wgmma_deterministic cold",
        "b4_h12_s4096_d128_causal_bf16_outliers_tokens1600_pages64_e4m3 cuda/flash cold",
        "s512 cuda/flash hot",
    ];
    let mut chart = rows_chart();
    let ChartBody::Rows(body) = &mut chart.body else { unreachable!() };
    body.rows.truncate(labels.len());
    for (row, label) in body.rows.iter_mut().zip(labels) {
        row.label = label.to_owned();
        row.value = "12.34 ms hot, 123.4 ms cold".to_owned();
    }
    let svg = chart.svg().unwrap();
    let shown = svg_texts(&svg).concat().replace(' ', "");
    for label in labels {
        assert!(shown.contains(&label.replace(' ', "")), "{label}: {shown}");
    }
    let at = |attribute| shape_numbers(&svg, "circle", attribute, colour::PurposeColour::Series(0));
    assert!(at("cx")[2] - at("cx")[0] > 50.0, "{:?}", at("cx"));
    // A row with one line has the usual height.
    let steps: Vec<f64> = at("cy").windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(steps[0] > steps[1] && steps[1] > 20.0, "{steps:?}");
    assert_shapes_inside(&chart.layout());
}

#[test]
fn long_titles_and_column_names_are_wrapped() {
    let mut chart = heat_map_chart();
    chart.subtitle =
        "share of the limit, fastest implementation; h56 w56 conv1 f32 int8, cold".to_owned();
    let ChartBody::Heat(body) = &mut chart.body else { unreachable!() };
    body.columns =
        ["heads12 tokens512 level8", "heads12 tokens1600 level16"].map(str::to_owned).into();
    let texts = svg_texts(&chart.svg().unwrap());
    assert!(!texts.iter().any(|text| text.contains('…')), "{texts:?}");
    let shown = texts.join(" ");
    for part in chart.subtitle.split(' ').chain(["tokens1600", "level16"]) {
        assert!(shown.contains(part), "{part}: {texts:?}");
    }
    assert_shapes_inside(&chart.layout());
}

#[test]
fn a_heat_map_cell_has_the_colour_of_its_value() {
    let svg = heat_map_chart().svg().unwrap();
    let cells_of_step =
        |step| shape_numbers(&svg, "rect", "x", colour::PurposeColour::Step(step)).len();
    assert_eq!((cells_of_step(0), cells_of_step(colour::HEAT_STEPS - 1)), (1, 1));
    let texts = svg_texts(&svg);
    ["1 µs", "8 µs", "b16", "right: t; down: b", "-"]
        .iter()
        .for_each(|text| assert!(texts.iter().any(|it| it == text), "{text}: {texts:?}"));
}

#[test]
fn a_png_shows_the_svg_without_needing_a_system_font() {
    let chart = curves_chart(ScaleKind::Log);
    let image = png::Decoder::new(std::io::Cursor::new(chart.png().unwrap()));
    let mut reader = image.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    let picture = chart.layout();
    assert_eq!(
        (info.width, info.height),
        ((2.0 * picture.width) as u32, (2.0 * picture.height).ceil() as u32)
    );
    let has = |colour: colour::PurposeColour| {
        pixels.chunks_exact(3).filter(|pixel| *pixel == colour.rgb()).count()
    };
    assert!(
        has(colour::PurposeColour::Series(0)) > 200 && has(colour::PurposeColour::Series(1)) > 200
    );
    // This row of pixels contains letters of the title.
    let row = 3 * info.width as usize;
    let title = &pixels[..row * 48];
    let ink = title.chunks_exact(3).filter(|pixel| pixel[0] < 0x80).count();
    assert!(ink > 300, "{ink} dark pixels where the title is");
}

#[test]
fn drawing_an_empty_chart_does_not_panic() {
    let empty = ChartAxis::new("x", PlottedUnit::Time, ScaleKind::Log);
    let bodies = [
        ChartBody::Xy(Xy {
            x: empty.clone(),
            y: empty.clone(),
            series: vec![],
            guides: vec![],
            broad: false,
        }),
        ChartBody::Rows(LabelledRows { axis: empty, legend: vec![], rows: vec![], origin: None }),
        ChartBody::Heat(HeatMap {
            columns: vec![],
            rows: vec![],
            cells: vec![],
            quantity: PlottedUnit::Time,
            names: (String::new(), String::new()),
        }),
    ];
    for body in bodies {
        let chart = ChartWithTitle { title: String::new(), subtitle: String::new(), body };
        assert!(chart.svg().unwrap().ends_with("</svg>"));
    }
}
