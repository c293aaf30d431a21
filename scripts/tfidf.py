"""TF-IDF and logistic regression, by scikit-learn, on the rows that scripts/classify.py reads: the accuracy to beat.

python scripts/tfidf.py [DATASET] [--label_column=NAME] [--text_column=NAME]     DATASET default: shakespeare_genre

It is fitted on train, by words and pairs of words, and prints its accuracy on each file. Nothing is tuned.
"""
import sys
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from configurator import broken
from data.bins import find_folder
from data.labelled import read_dataset
from scripts.common import fail, one_line_parser, printing


def main():
    parser = one_line_parser(__doc__, '[DATASET] [--label_column=NAME] [--text_column=NAME]')
    parser.add_argument('dataset', metavar='DATASET', nargs='?', default='shakespeare_genre')
    parser.add_argument('--label_column', default='')
    parser.add_argument('--text_column', default='')
    args = parser.parse_args()
    rows = read_dataset(find_folder(args.dataset), args.label_column, args.text_column)
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except Exception as error:
        fail(f'the baseline needs scikit-learn: pip install scikit-learn{broken(error)}', code=1)
    vectorizer, model = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2)), LogisticRegression(max_iter=1000)
    model.fit(vectorizer.fit_transform(rows['train'][2]), rows['train'][1])
    for split, (_, labels, texts, _) in rows.items():
        print(f'[tfidf {split}] acc {model.score(vectorizer.transform(texts), labels):.2%}')


if __name__ == '__main__':
    with printing():
        main()
